"""Readers for files of rows and texts that several tasks use."""
