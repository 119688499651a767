"""The YAML that describes a merge: schema, parsing, layer gradients, filters."""
