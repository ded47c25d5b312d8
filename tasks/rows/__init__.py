"""Files of rows and texts that several tasks read."""
