"""Represent what registers hold: terms, words of bits, conditions, and their arithmetic."""
