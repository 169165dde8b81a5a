"""Automatic differentiation: the rule table, activity, the reverse and the forward walk, accumulation."""
