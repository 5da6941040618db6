"""Floor 9: the node, one process that serves everything a configuration names.

>>> from penstock.node import NodeConfig
>>> NodeConfig().on_failure
'serve'
"""

from penstock.node.config import NodeConfig, check_config, load_config
from penstock.node.ingest import IngestWriter
from penstock.node.node import Node
from penstock.node.supervisor import Spec, Supervisor

__all__ = ["Node", "IngestWriter", "NodeConfig", "load_config", "check_config", "Supervisor", "Spec"]
