"""Processes of a run and the ties between them: they die with their parent, and talk over sockets. Torch-free."""
