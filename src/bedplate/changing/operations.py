"""The operations of a running host that change its engines, or evaluate whether to change them."""

from __future__ import annotations

from bedplate.changing.migrate import MigrationRequest, migrate
from bedplate.changing.outlook import OutlookRequest, report_outlook
from bedplate.changing.shadow import ShadowRequest, run_shadow
from bedplate.hosting.control import Operation

CHANGING_OPERATIONS = {
    "migrate": Operation(MigrationRequest, migrate, goes_on=True),
    "outlook": Operation(OutlookRequest, report_outlook),
    "shadow": Operation(ShadowRequest, run_shadow),
}
