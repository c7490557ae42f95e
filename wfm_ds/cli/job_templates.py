"""Job scripts and manifests that `wfm launch` fills in. `@name` is a placeholder, and `@@` is an at sign."""

from __future__ import annotations

import string


class JobTemplate(string.Template):
    delimiter = "@"


# Exit code of a run that saved a checkpoint and should be started again. EX_TEMPFAIL of sysexits.h.
PREEMPTED_CODE = 75

SLURM = JobTemplate("""\
#!/bin/bash
#SBATCH --job-name=@name
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=@nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus
#SBATCH --cpus-per-task=@cpus
@{time_line}#SBATCH --signal=TERM@@@signal_s
#SBATCH --requeue

export WFM_GRACE_S=@grace_s  # seconds for the checkpoint after SIGTERM
export WFM_PREEMPTED_CODE=@preempted_code
export HOSTS=$PWD/@name.$SLURM_JOB_ID.hosts PORT=$((15000 + SLURM_JOB_ID % 10000))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/ slots=@gpus/' > "$HOSTS"

# One launcher per node. When one of them has ended, the others have 60 seconds to end too. srun does not take over
# --cpus-per-task from sbatch.
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
    exec deepspeed --hostfile "$HOSTS" --no_ssh --node_rank "$SLURM_NODEID" --master_addr "$HEAD" \\
        --master_port "$PORT" -m wfm_ds.train "$@@"' train \\
    @arguments
code=$?
rm -f "$HOSTS"
if [ "$code" -eq @preempted_code ]; then  # the run saved a checkpoint and stopped: continue it later
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
""")

K8S = JobTemplate("""\
@{config_map}apiVersion: v1
kind: Service
metadata: {name: "@name"}
spec: {clusterIP: None, selector: {job-name: "@name"}, publishNotReadyAddresses: true}
---
apiVersion: batch/v1
kind: Job
metadata: {name: "@name"}
spec:
  completionMode: Indexed
  completions: @nodes
  parallelism: @nodes
  backoffLimit: @backoff
  podFailurePolicy:
    rules:
      - {action: FailJob, onExitCodes: {containerName: train, operator: In, values: [2]}}  # an error of the user
      - {action: Ignore, onExitCodes: {containerName: train, operator: In, values: [@preempted_code]}}  # run again
      - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
  template:
    spec:
      subdomain: "@name"
      restartPolicy: Never
      terminationGracePeriodSeconds: @signal_s  # from SIGTERM to SIGKILL
      containers:
        - name: train
          image: @image
          command: [bash, -c]
          args:
            - |
              for i in {0..@last}; do echo "@name-$i slots=@gpus"; done > /tmp/hosts
              exec deepspeed --hostfile /tmp/hosts --no_ssh --node_rank "$JOB_COMPLETION_INDEX" \\
                --master_addr @name-0.@name --master_port 29500 -m wfm_ds.train \\
                @arguments
          env:
            - {name: WFM_GRACE_S, value: "@grace_s"}  # seconds for the checkpoint after SIGTERM
            - {name: WFM_PREEMPTED_CODE, value: "@preempted_code"}
          resources: {limits: {nvidia.com/gpu: @gpus}}
          volumeMounts:
            - {name: shared, mountPath: @mount_path}
            - {name: shm, mountPath: /dev/shm}
@{recipe_mount}      volumes:
        - {name: shared, persistentVolumeClaim: {claimName: "@claim"}}
        - {name: shm, emptyDir: {medium: Memory}}
@{recipe_volume}""")

CONFIG_MAP = JobTemplate("""\
apiVersion: v1
kind: ConfigMap
metadata: {name: @name-recipe}
data:
  recipe.yaml: |
@recipe
---
""")
RECIPE_MOUNT = "            - {name: recipe, mountPath: /etc/wfm}\n"
RECIPE_VOLUME = JobTemplate("        - {name: recipe, configMap: {name: @name-recipe}}\n")

SKYPILOT = JobTemplate("""\
name: "@name"
workdir: .
num_nodes: @nodes
resources:
  accelerators: "@accelerator:@gpus"
@{image_line}  job_recovery:  # of managed jobs: sky jobs launch
    recover_on_exit_codes: [@preempted_code]
@{volume_lines}envs:
  WFM_GRACE_S: "@grace_s"  # seconds for the checkpoint after SIGTERM
  WFM_PREEMPTED_CODE: "@preempted_code"
@{setup_lines}run: |
  echo "$SKYPILOT_NODE_IPS" | sed 's/$/ slots=@gpus/' > /tmp/hosts
  exec deepspeed --hostfile /tmp/hosts --no_ssh --node_rank "$SKYPILOT_NODE_RANK" \\
    --master_addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master_port 29500 -m wfm_ds.train \\
    @arguments
""")

SKYPILOT_SETUP = """\
setup: |
  DS_BUILD_OPS=0 pip install -e .  # in the checkout, which workdir copies
"""

PDSH = JobTemplate("""\
#!/bin/bash
# Run this script on a machine that reaches the hosts by ssh. Ctrl-C or SIGTERM saves a checkpoint and stops the run.
cd @folder || exit
WFM_GRACE_S=${WFM_GRACE_S:-@grace_s}  # seconds for the checkpoint
printf '%s\\n' @host_lines > @name.hosts
deepspeed --hostfile @name.hosts --master_addr @head -m wfm_ds.train \\
    @arguments &
launcher=$!

save_and_stop() {
    trap - INT TERM  # a second signal ends this script, but not the run
    # A signal to the launcher would leave the ranks only 30 seconds, so signal one rank. The brackets keep pkill from
    # finding its own command line.
    pdsh -S -R ssh -w @head @pkill || kill "$launcher"
    (trap 'kill $!; exit' TERM; sleep "$WFM_GRACE_S" & wait $!; kill "$launcher") &
    timer=$!
}
trap save_and_stop INT TERM
while kill -0 "$launcher" 2> /dev/null; do
    wait "$launcher"  # a signal ends the wait too
done
wait "$launcher"
code=$?
if [ -n "$timer" ]; then
    kill "$timer"
fi
exit "$code"
""")
