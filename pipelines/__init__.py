"""The scheduled flows: composed of `kvq_calib.flow.flow`, deployed by `flows.yaml`."""
