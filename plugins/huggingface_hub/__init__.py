"""Files of a Hub repository or a local path, and uploads to the Hub."""
