"""The data contract: what travels from a rollout engine to the trainer, and what each side promises.

numpy, msgspec and zstd only, so that it imports on a login node. Parquet dumps are `moerl.contract.disk`, which needs
pyarrow. Written down in docs/data_contract.md.
"""

from moerl.contract.reasons import Reason as Reason
