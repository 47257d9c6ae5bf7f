"""Lines of a script that start the ranks in a container. Pure bash text."""

import os.path

from hpctrain.jobs.quoting import quote
from hpctrain.jobs.spec import JobSpec

__all__ = ["inside"]

# The script itself stays outside of the container, as it needs scontrol.
_APPTAINER = """\
# In the container: the submit directory and that of the run, all variables, and the GPUs where the
# job has some.
launch+=(apptainer exec ${{SLURM_GPUS_ON_NODE:+--nv}} --pwd "$PWD" --bind "$SLURM_SUBMIT_DIR"
    --bind "$HPCTRAIN_RUN_DIR"{scratch} {image})"""

_PYXIS = """\
# In the container: the submit directory and that of the run, and all variables.
mounts=$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR,$HPCTRAIN_RUN_DIR:$HPCTRAIN_RUN_DIR{scratch}
launch+=(--container-image={image}
    --container-mounts="$mounts" --container-workdir="$PWD"
    --container-env="{variables}") # these override the variables of the image"""


_PATHS = """\
case $SLURM_SUBMIT_DIR$HPCTRAIN_RUN_DIR in
*[,:]*)
    echo "a container cannot mount folders with , or : $SLURM_SUBMIT_DIR $HPCTRAIN_RUN_DIR" >&2
    exit 2
    ;;
esac
"""


def inside(spec: JobSpec) -> str:
    """Return the lines that add the container to `launch`; empty without a container."""
    return _PATHS + _container(spec) if spec.container else ""


def _container(spec: JobSpec) -> str:
    staged = bool(spec.stage_code or spec.stage_data)
    if spec.container_runtime == "pyxis":
        names = ",".join(("OMP_NUM_THREADS", *spec.environment))
        return _PYXIS.format(
            image=_image(spec.container, ("./", "../")),
            scratch=",$scratch:$scratch" if staged else "",
            variables=names,
        )
    return _APPTAINER.format(
        image=_image(spec.container, ("",)), scratch=' --bind "$scratch"' if staged else ""
    )


def _image(name: str, relative: tuple[str, ...]) -> str:
    """Return the image, a relative path below the submit directory: ranks may start elsewhere."""
    if "://" in name or os.path.isabs(name) or not name.startswith(relative):
        return quote(name)
    return f'"$SLURM_SUBMIT_DIR"/{quote(name)}'
