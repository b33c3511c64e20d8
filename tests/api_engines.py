"""Engines with chat completions alone, against which the clients of other APIs are tested."""

ENGINES = {"onnxruntime": True, "pytorch": False}
"""Engine → whether it has tools with the built-in model, whose chat template has no place for them.

bedplate's server extends the template by tools; that of Transformers does not."""
