"""How nodes find each other: who leads, and an authenticated channel to it."""
