"""Commands, one module each: options, the call of the function that does the work, and the output."""
