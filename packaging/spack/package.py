"""The recipe of mpikfac for Spack 1.0 and newer; packaging/README.md tells how to use it."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpikfac(PythonPackage):
    """Distributed K-FAC for training CNNs under MPI."""

    license("MIT")

    version("0.1.0")  # no archive to fetch yet: spack dev-build takes the folder of the source

    variant("apps", default=False, description="Install what the command mpikfac needs")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-torch@2.9:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-h5py@3.11:", type=("build", "run"))
    depends_on("py-blake3@1.0:", type=("build", "run"))
    depends_on("py-lazy-loader@0.4:", type=("build", "run"))

    with when("+apps"):
        depends_on("py-jinja2@3.1:", type=("build", "run"))
        depends_on("py-jsonargparse@4.40:+signatures", type=("build", "run"))
        depends_on("py-matplotlib@3.8:", type=("build", "run"))
        depends_on("py-pyyaml@6.0:", type=("build", "run"))
        depends_on("py-tabulate@0.9:", type=("build", "run"))
        depends_on("py-tqdm@4.66:", type=("build", "run"))
