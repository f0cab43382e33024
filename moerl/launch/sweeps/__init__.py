"""`moerl train -m`: runs that differ in the values of some keys. Torch-free; the process that a user started."""
