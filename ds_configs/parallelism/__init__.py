"""Rules and arithmetic of the axes beyond data parallelism; pure, shared by the planner and the trainers."""
