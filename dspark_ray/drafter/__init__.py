"""The draft model: heads, backbone, checkpoints, context cache and the batched runner."""
