"""Decide about launches as the hook does: the model that tests compare the hook with.

Nothing of the product imports it, and packages do not have it.
"""
