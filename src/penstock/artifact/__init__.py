"""Floor 6: a store exported at one cursor, sent to an object store, and brought to another node.

>>> from penstock.artifact import ExportManifest
>>> ExportManifest.__name__
'ExportManifest'
"""

from penstock.artifact.bootstrap import BootstrapReport, Window, bootstrap, bucket_window, choose_way, log_window
from penstock.artifact.export import export_store
from penstock.artifact.here import artifact_here, fold_here, open_fold
from penstock.artifact.imports import import_artifact, read_manifest, verify_artifact
from penstock.artifact.lease import ExportLease, LeaseGuard, LeaseRecord
from penstock.artifact.manifest import ArtifactFile, ExportManifest, decode_manifest, encode_manifest, payload_name
from penstock.artifact.part import ExportPart
from penstock.artifact.round import RoundReport, RoundState, exporter_of, run_export_round
from penstock.artifact.transport import Outcome, Transport, transport_for

__all__ = [
    "export_store",
    "import_artifact",
    "read_manifest",
    "verify_artifact",
    "artifact_here",
    "fold_here",
    "open_fold",
    "ExportManifest",
    "ArtifactFile",
    "encode_manifest",
    "decode_manifest",
    "payload_name",
    "Transport",
    "Outcome",
    "transport_for",
    "ExportLease",
    "LeaseGuard",
    "LeaseRecord",
    "ExportPart",
    "run_export_round",
    "exporter_of",
    "RoundReport",
    "RoundState",
    "bootstrap",
    "BootstrapReport",
    "Window",
    "bucket_window",
    "log_window",
    "choose_way",
]
