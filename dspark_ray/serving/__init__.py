"""The Ray Serve application: the only place that imports ray.serve."""
