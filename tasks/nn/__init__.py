"""Parts of networks that several tasks use."""
