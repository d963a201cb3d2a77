"""The control plane: load, tau policies, autoscaling and telemetry. Pure but for telemetry."""
