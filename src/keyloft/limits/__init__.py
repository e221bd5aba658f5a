"""Every limit and every tuned number of the product: a module for each area, and all names here: `limits.KEY_BYTES`.

Tests and callers read and replace them here, as attributes of the package. Each name is used once.
"""

from keyloft.limits.admin_page import *  # noqa: F403
from keyloft.limits.engines import *  # noqa: F403
from keyloft.limits.etcd import *  # noqa: F403
from keyloft.limits.http import *  # noqa: F403
from keyloft.limits.nats import *  # noqa: F403
from keyloft.limits.operators import *  # noqa: F403
from keyloft.limits.plugins import *  # noqa: F403
from keyloft.limits.postgres import *  # noqa: F403
from keyloft.limits.semantic import *  # noqa: F403
from keyloft.limits.server import *  # noqa: F403
from keyloft.limits.sqlite import *  # noqa: F403
from keyloft.limits.values import *  # noqa: F403
