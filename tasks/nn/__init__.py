"""Network modules and functions that several tasks use."""
