//! Ranks that have a GPU each, connected by NVIDIA's NCCL, which is loaded when the first world is joined.
//!
//! All ranks meet in a [`store`](crate::store): it hands out NCCL's ids, and is where a failure is told and a silent rank
//! found out. Each group is a communicator of NCCL's with a stream and a thread of its own. What is started waits on the
//! device for what it needs, and what comes after waits on the device for its result: the host goes on. Tensors of the CPU
//! are carried over the GPU. The groups of a device launch in the order of the calls, so that ranks which call their groups in
//! one order launch in one order. NCCL connects two ranks in the first launch that needs it: such a launch waits for the other
//! rank's, and later calls of this rank, to any group, wait for it.
//!
//! Where this differs from the other engines: NCCL adds in its own order, the same on all ranks but not that of the ranks;
//! collectives that do not fit together are found out by the time-out; and that counts for an operation as a whole, from when
//! this rank's part of it was ready. A tensor of another dtype or shape than its receiver expects is found out by the
//! description that travels with it, after the exchange or while it hangs, so that no exchange waits for a description.
//! Sums of f16 and bf16 are taken in f32, in tensors twice as large.

mod api;
mod communicator;
mod description;
mod group;
mod launch_order;
mod memory;
mod worker;

use std::sync::Arc;

use candle_core::{CudaDevice, Device};

use crate::call::CallTrace;
use crate::peer::PeerInfo;
use crate::rendezvous::PeerRendezvous;
use crate::store::{Client, Server};
use crate::thread_pool::ThreadPool;
use crate::watchdog::Watchdog;
use crate::{Options, Result, World};
use group::NcclGroup;
use worker::{NcclRank, NcclWorker};

/// Joins the world of `size` ranks that meet in `store`, as rank `rank` with the GPU `device`; returns when all have joined,
/// and fails if they have not within `options.timeout`. One rank is a world, too. `host` is the store, if this rank has it:
/// it is kept until the others have left.
///
/// Each run, and each restart of it, needs keys of its own: see [`Client::with_prefix`].
pub fn join(
    store: &Client,
    rank: usize,
    size: usize,
    device: &Device,
    host: Option<Server>,
    options: Options,
) -> Result<World> {
    let rendezvous = PeerRendezvous::new(store.with_prefix("nccl"), rank, size, options.timeout)?;
    let Device::Cuda(cuda) = device else {
        let why = format!("NCCL connects GPUs, and this rank computes on {:?}", device.location());
        return Err(rendezvous.join_error(why));
    };
    let refuse = |why| rendezvous.join_error(why);
    api::nccl().map_err(refuse)?;
    let own = PeerInfo::this_process(rank, size, uuid(cuda).map_err(refuse)?);
    let peers = rendezvous.exchange_peers(&own, |_| Ok(()))?;
    check_devices(&peers).map_err(refuse)?;
    let watchdog = Watchdog::start(rendezvous.store(), own, peers, options.timeout)?;
    let watchdog = Arc::new(watchdog.with_host(host));
    let (threads, trace) = (Arc::<ThreadPool>::default(), CallTrace::new(options.record));
    let (everyone, order) = ((0..size).collect::<Vec<_>>(), Arc::default());
    let shared = NcclRank { watchdog: Arc::clone(&watchdog), device: cuda.clone(), order };
    let worker = NcclWorker::open(&shared, "world", "world".into(), &everyone);
    let worker = worker.map_err(|error| error.fail_connect(&*watchdog, &everyone))?;
    let group = NcclGroup::new(worker, device, trace.clone(), Arc::clone(&threads))?;
    Ok(World::from_group(Arc::new(group), watchdog, options.timeout, threads, trace))
}

/// Returns the UUID of a rank's GPU.
fn uuid(device: &CudaDevice) -> Result<String, String> {
    let uuid = device.cuda_stream().context().uuid().map_err(|error| format!("name its GPU: {error}"))?;
    Ok(uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
}

/// Fails if two ranks have one GPU.
fn check_devices(peers: &[PeerInfo]) -> Result<(), String> {
    let shared = peers.iter().enumerate().find_map(|(at, other)| {
        let one = peers[..at].iter().find(|one| one.address == other.address)?;
        Some((one, other))
    });
    shared.map_or(Ok(()), |(one, other)| {
        Err(format!(
            "{one} and {other} have the same GPU, and NCCL wants one for each; set ddp_backend: staged to share it"
        ))
    })
}
