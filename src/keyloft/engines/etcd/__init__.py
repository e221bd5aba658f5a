"""The engine on etcd: `engine` is the engine, `maintenance` the operator's view of it."""

from keyloft.core.extras import not_installed
from keyloft.errors import CannotOpen

try:
    import google.protobuf  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
    import grpc  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
except ModuleNotFoundError as error:
    raise CannotOpen(not_installed(str(error.name).partition(".")[0], "etcd")) from error
