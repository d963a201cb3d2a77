"""LLM serving on Ray Serve with disaggregated DSpark speculative decoding.

Importing this package is cheap: neither torch, ray nor vllm is loaded until a module that needs it is.
"""

__version__ = "0.1.0"
