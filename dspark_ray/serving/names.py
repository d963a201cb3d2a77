"""What the deployments of an application are called."""

PREFILL_PREFIX = "Prefill:"
VERIFIER_PREFIX = "Verifier:"
DRAFTER_PREFIX = "Drafter:"
INGRESS_NAME = "Ingress"


def deployment_suffix(model_id: str) -> str:
    """A model id as Ray Serve LLM writes it in names of deployments."""
    return model_id.replace("/", "--").replace(".", "_")
