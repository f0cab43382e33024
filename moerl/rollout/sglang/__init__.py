"""SGLang as a rollout engine: its environment and patches, its server process, and the client behind the port.

SGLang itself runs in an environment of its own, behind HTTP; nothing here imports it, and nothing here needs torch.
"""
