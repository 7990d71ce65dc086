"""The fast write: one experience into imprints, a trace and a self, in one pass and without a gradient."""
