"""Preference and reinforcement learning: data as users have it, rewards, and the trainers of TRL."""
