"""What ties processes of a run together: they die with their parent, and talk over sockets. Torch-free."""
