"""The vLLM shim: worker and model runner that let a remote drafter into the engine's step."""
