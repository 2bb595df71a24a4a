#!/usr/bin/env bash
# Unpack Debian's Chromium into a folder, with the libraries that this system lacks: get_chromium.sh DIR. Installs nothing.
set -euo pipefail
packages=$(apt-get -s install --no-install-recommends chromium | awk '/^Inst/ {print $2}')
[ -n "$packages" ] || { echo "chromium is installed"; exit; }
rm -rf "$1"
mkdir -p "$1/packages"
cd "$1"
# shellcheck disable=SC2086
(cd packages && apt-get -q download $packages)
for package in packages/*.deb; do
    dpkg -x "$package" .
done
rm -r packages
libraries=$PWD/usr/lib/$(uname -m)-linux-gnu
cat >starts <<END
#!/bin/sh
LD_LIBRARY_PATH=$libraries:$libraries/pulseaudio exec "$PWD/usr/lib/chromium/chromium" "\$@"
END
chmod +x starts
./starts --version
mv starts chromium
