//! The choice of the communication backend, as far as possible before a device is opened.

use candlewick_ops::DeviceChoice;

use super::environment::{BuildFeatures, Machines};
use super::resolver::Resolver;
use crate::recipe::DdpBackend;

const KEY: &str = "ddp_backend";

const ADD_MPI: &str = "build it with `--features mpi` (docs/distributed.md lists the requirements)";

pub(super) fn resolve(resolver: &mut Resolver) -> DdpBackend {
    let given = resolver.recipe().ddp_backend;
    let backend = resolver.pick(KEY, given, DdpBackend::Auto);
    if resolver.env.world.n_ranks > 1 {
        if let Some((message, advice)) = obstacle(resolver, backend) {
            resolver.report_with_advice(&[KEY, "device"], message, advice);
        }
    } else if backend != DdpBackend::Auto {
        resolver.note(format!("{KEY} has no effect on a single rank"));
    }
    backend
}

/// Returns the reason why a backend cannot connect the ranks, and the remedy.
fn obstacle(resolver: &Resolver, backend: DdpBackend) -> Option<(String, String)> {
    use DdpBackend::{Auto, Local, Mpi, Nccl, Staged};
    let (machines, device) = (resolver.env.world.machines, device(resolver)?);
    let is_several = machines == Machines::Several;
    // The ranks may run another build.
    let features = if machines == Machines::Unknown { BuildFeatures::ALL } else { resolver.env.features };
    let on_cpu = device == DeviceChoice::Cpu || (device == DeviceChoice::Auto && !features.nccl);
    let on_gpu = matches!(device, DeviceChoice::Cuda(_));
    let say = |message: &str, advice: &str| Some((format!("{KEY}: {message}"), advice.to_owned()));
    match backend {
        Local | Mpi if on_gpu => say(
            &format!("{} exchanges CPU tensors, but device is {device}", name(backend)),
            "set ddp_backend: nccl, or staged if ranks share a GPU",
        ),
        Local if is_several => say(
            "local connects processes of one machine, but the ranks run on several machines",
            "set ddp_backend: mpi (CPU) or nccl (GPU)",
        ),
        Mpi if !features.mpi => say("this program was built without MPI", ADD_MPI),
        Nccl if !features.nccl => {
            say("this program was built without CUDA", "scripts/build-gpu builds one with it; on the CPU use auto")
        }
        Nccl if on_cpu => say("NCCL connects GPUs, but device is cpu", "set device: cuda, or ddp_backend: auto"),
        Nccl | Auto if matches!(device, DeviceChoice::Cuda(1..)) => say(
            &format!("all ranks would use {device}, but NCCL needs a GPU for each rank"),
            "set device: cuda (each rank uses the GPU of its local rank), or ddp_backend: staged",
        ),
        Auto if is_several && on_cpu && !features.mpi => {
            say("the ranks run on several machines, but this program was built without MPI", ADD_MPI)
        }
        Staged if is_several && !features.mpi => say(
            "the ranks run on several machines, which staged connects by MPI, but this program was built without MPI",
            ADD_MPI,
        ),
        Auto | Local | Mpi | Nccl | Staged => None,
    }
}

/// Returns true if the run computes on a GPU. A program for GPUs does so by default, unless this machine's is unusable.
pub(super) fn is_on_gpu(resolver: &Resolver) -> bool {
    match device(resolver) {
        Some(DeviceChoice::Cuda(_)) => true,
        Some(DeviceChoice::Auto) => resolver.env.features.nccl && resolver.env.missing_gpu.is_none(),
        Some(DeviceChoice::Cpu) | None => false,
    }
}

/// Returns the recipe's device; `None` if its name is invalid, which is reported elsewhere.
fn device(resolver: &Resolver) -> Option<DeviceChoice> {
    resolver.recipe().device.as_deref().map_or(Some(DeviceChoice::Auto), |name| name.parse().ok())
}

fn name(backend: DdpBackend) -> &'static str {
    if backend == DdpBackend::Mpi { "mpi" } else { "local" }
}
