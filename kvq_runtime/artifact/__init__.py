ARTIFACT_FILE = "kvq.safetensors"  # in a folder, and in a repository of a Hub
