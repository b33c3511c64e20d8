"""The operations of a running host that change its engines, or evaluate whether to change them."""

from __future__ import annotations

from bedplate.changing.migrate import Migrate, migrate
from bedplate.changing.outlook import AskOutlook, outlook
from bedplate.changing.shadow import Shadow, shadow
from bedplate.hosting.control import Operation

CHANGING_OPERATIONS = {
    "migrate": Operation(Migrate, migrate, goes_on=True),
    "outlook": Operation(AskOutlook, outlook),
    "shadow": Operation(Shadow, shadow),
}
