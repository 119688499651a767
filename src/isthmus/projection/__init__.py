"""Output-space projection: the merge that is nearest to the experts' outputs, as a convex programme."""
