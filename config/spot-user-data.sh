#!/bin/sh
# User data of a spot machine: installs ckpt-run and runs a job as a service. The next machine with the same user data
# continues the job. AWS: user data. Google: metadata key startup-script. Azure: custom data of an image with cloud-init.
# The machine's role needs access to the bucket. The machine image contains the job, and the packages of `make wheel`.
set -eu

# Folder or address of the packages.
wheels=/opt/wheels

if [ ! -x /opt/ckpt-run/bin/ckpt-run ]; then
    python3 -m venv /opt/ckpt-run
    /opt/ckpt-run/bin/pip install --no-index --find-links "$wheels" ckpt-run ckpt-run-criu
fi
mkdir -p /srv/train

cat > /etc/systemd/system/train.service <<'UNIT'
[Unit]
Description=job under ckpt-run
After=network-online.target local-fs.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
WorkingDirectory=/srv/train
# Folder for the images: each run needs one of its own. S3 needs the region of the bucket.
Environment=CKPT_RUN_REMOTE_URL=s3://BUCKET/train
Environment=AWS_REGION=us-east-1
# The cloud announces the end of the machine: the last image is taken and uploaded. "auto" finds the cloud.
Environment=CKPT_RUN_PREEMPTION_WATCH=auto
ExecStart=/opt/ckpt-run/bin/ckpt-run --store /var/lib/ckpt-run/train --interval 15m --grace 90s -- python train.py

# SIGTERM goes to ckpt-run alone, which saves the job and exits with 75.
KillMode=mixed
# Longer than --grace and hooks.timeout together.
TimeoutStopSec=130s
# The start may wait for the lease of the machine before.
TimeoutStartSec=infinity

# 75, 143: saved and stopped, because the machine ends: the next one continues. 76: another machine had the lease.
SuccessExitStatus=75 143
RestartForceExitStatus=76
Restart=on-failure
# 2, 126, 127: the command is wrong.
RestartPreventExitStatus=2 126 127
RestartSec=10s

OOMPolicy=continue
LimitNOFILE=1048576
LimitCORE=0
LimitMEMLOCK=infinity

[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable train.service
# The boot must not wait for the job.
systemctl start --no-block train.service
