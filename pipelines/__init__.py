"""What is scheduled: flows composed of `kvq_calib.flow`, deployed by `flows.yaml`."""
