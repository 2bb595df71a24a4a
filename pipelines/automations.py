"""Report failed gates, drift and 36 hours without a calibration to a webhook; mark dead runs as crashed.

Each is an automation of the Prefect server, which a later definition of the same name replaces.
"""

from datetime import timedelta
from typing import Any

from prefect.automations import AutomationCore
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture

from kvq_calib.flow.flow import GATE_FAILED
from pipelines.flows import DRIFTED

RUNS: Any = {"prefect.resource.id": "prefect.flow-run.*"}
CALIBRATIONS: Any = {"prefect.resource.role": "flow", "prefect.resource.name": "kvq-calibrate"}
SILENCE = timedelta(hours=36)
ONCE = timedelta(minutes=1)  # in which the server may evaluate an event again, if the database was busy
DEAD = timedelta(seconds=90)  # three heartbeats of 30 seconds
STATE = '{"text": {{ ("kvq, " ~ flow.name ~ " " ~ flow_run.name ~ ": " ~ flow_run.state.message) | tojson }}}'
NO_SUCCESS = '{"text": "kvq: no calibration has succeeded for 36 hours"}'


def define(webhook: str | None = None) -> None:
    """Define the automations on the server in use.

    webhook   where messages are posted, as JSON {"text": ...}; None: no messages, and only dead runs are found
    """
    automations = [find_dead()]
    if webhook is not None:
        block = save_webhook(webhook)
        automations.append(report_state("kvq: a gate failed", GATE_FAILED, block))
        automations.append(report_state("kvq: drift", DRIFTED, block))
        automations.append(report_silence(block))
    for automation in automations:
        create(automation)


def report_state(name: str, state: str, block: Any) -> AutomationCore:
    """Post the message of each run that enters a state, once."""
    expect, each = {f"prefect.flow-run.{state}"}, {"prefect.resource.id"}
    trigger = EventTrigger(expect=expect, match=RUNS, for_each=each, posture=Posture.Reactive, threshold=1, within=ONCE)
    return AutomationCore(name=name, trigger=trigger, actions=[CallWebhook(block_document_id=block, payload=STATE)])


def report_silence(block: Any, within: timedelta = SILENCE) -> AutomationCore:
    """Post a message when no calibration has completed for this long, and again after as long."""
    expect = {"prefect.flow-run.Completed"}
    trigger = EventTrigger(
        expect=expect, match=RUNS, match_related=CALIBRATIONS, posture=Posture.Proactive, threshold=1, within=within
    )
    call = CallWebhook(block_document_id=block, payload=NO_SUCCESS)
    return AutomationCore(name="kvq: no success for 36 hours", trigger=trigger, actions=[call])


def find_dead(within: timedelta = DEAD) -> AutomationCore:
    """Mark a run that sends no heartbeats any more as crashed: kill -9, a lost machine."""
    after, expect, each = {"prefect.flow-run.heartbeat"}, {"prefect.flow-run.*"}, {"prefect.resource.id"}
    trigger = EventTrigger(
        after=after, expect=expect, match=RUNS, for_each=each, posture=Posture.Proactive, threshold=1, within=within
    )
    message = "No heartbeat for 90 s: its process died. A retry resumes."
    crashed = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=message, force=False)
    return AutomationCore(name="kvq: find the dead", trigger=trigger, actions=[crashed])


def save_webhook(url: str) -> Any:
    """Save the address as a block of the server; return the block's id."""
    block: Any = Webhook(url=url)  # type: ignore[arg-type]
    return block.save(name="kvq-webhook", overwrite=True)


def create(automation: AutomationCore) -> None:
    """Create an automation, in place of those of its name."""
    with get_client(sync_client=True) as client:
        for old in client.read_automations_by_name(automation.name):
            client.delete_automation(old.id)
        client.create_automation(automation)
