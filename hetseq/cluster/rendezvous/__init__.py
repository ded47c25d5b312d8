"""Rendezvous: how nodes find each other, elect a head, and open an authenticated channel to it."""
