"""What the deployments of an application are called, and the least that a replica reserves."""

PREFILL_PREFIX = "Prefill:"
VERIFIER_PREFIX = "Verifier:"
DRAFTER_PREFIX = "Drafter:"
INGRESS_NAME = "Ingress"
LEAST_CPUS = 0.01
"""A Ray placement group refuses a bundle that reserves nothing."""


def deployment_suffix(model_id: str) -> str:
    """A model id as Ray Serve LLM writes it in names of deployments."""
    return model_id.replace("/", "--").replace(".", "_")
