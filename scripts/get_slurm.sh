#!/usr/bin/env bash
# Unpack Debian's sbatch and srun into a folder, for a cluster that nothing answers for: get_slurm.sh DIR. Installs nothing.
# They check a job's options, and end where they would ask the controller.
set -euo pipefail
rm -rf "$1"
mkdir -p "$1"
cd "$1"
apt-get -q download slurm-client slurm-wlm-basic-plugins
for package in *.deb; do
    dpkg -x "$package" .
done
rm ./*.deb
library=$(find "$PWD/usr/lib" -name libslurmfull.so)
cat >slurm.conf <<END
ClusterName=none
SlurmctldHost=localhost
SlurmctldPort=1
PluginDir=${library%/*}
AuthType=auth/none
CredType=cred/none
SelectType=select/cons_tres
GresTypes=gpu
MessageTimeout=1
NodeName=localhost
PartitionName=all Nodes=localhost Default=YES
END
for program in sbatch srun; do
    cat >$program <<END
#!/bin/sh
SLURM_CONF=$PWD/slurm.conf LD_LIBRARY_PATH=${library%/*} exec "$PWD/usr/bin/$program" "\$@"
END
    chmod +x $program
done
./sbatch --version
