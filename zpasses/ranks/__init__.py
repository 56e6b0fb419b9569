"""Ranks decide identically: they vote through the store before they take a path that another rank
might not take.
"""
