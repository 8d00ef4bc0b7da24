"""Commands, one small module per verb: options, the call of the room that does the work, and what is shown of it."""
