"""The operations of a running host that change its engines, or evaluate whether to change them."""

from __future__ import annotations

from bedplate.changing.migrate import CancelRequest, MigrationRequest, cancel_migration, migrate
from bedplate.changing.outlook import OutlookRequest, report_outlook
from bedplate.changing.shadow import ShadowRequest, run_shadow
from bedplate.hosting.control import Operation

CHANGING_OPERATIONS = {
    "cancel": Operation(CancelRequest, cancel_migration, goes_on=True),
    "migrate": Operation(MigrationRequest, migrate, goes_on=True),
    "outlook": Operation(OutlookRequest, report_outlook),
    "shadow": Operation(ShadowRequest, run_shadow),
}
