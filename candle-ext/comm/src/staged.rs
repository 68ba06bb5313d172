//! Tensors of any device over a CPU process group, staged through host memory.
//!
//! Several ranks can share one GPU, which NCCL does not support. Staging is for correctness, not for speed. The start of an
//! operation synchronizes with the device and copies the input to the host. The wait copies the result back.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::{Collective, Pending, Recv, Reduce, Result};

/// Process group of tensors of any device, over a CPU process group.
///
/// A result is on the device of its input. A received tensor without an input is on the group's own device.
pub struct StagedGroup {
    group: Arc<dyn Collective>,
    device: Device,
    route: Arc<dyn Route>,
}

impl StagedGroup {
    /// Wraps `group`, which supports CPU tensors.
    pub fn new(group: Arc<dyn Collective>, device: &Device) -> Self {
        Self { group, device: device.clone(), route: Arc::new(Copying) }
    }

    /// Copies `x` to the host and starts `operation` on the copy. The result is copied to the device of `x`.
    fn stage(&self, x: &Tensor, operation: impl FnOnce(&Tensor) -> Result<Pending>) -> Result<Pending> {
        let (route, device) = (Arc::clone(&self.route), x.device().clone());
        Ok(operation(&self.route.down(x)?)?.then(move |y| route.up(y, &device)))
    }
}

/// Copies a tensor to the host and synchronizes, because the driver may return before it has written pageable memory.
pub(crate) fn to_host(x: &Tensor) -> candle_core::Result<Tensor> {
    let here = x.to_device(&Device::Cpu)?;
    x.device().synchronize()?;
    Ok(here)
}

/// Copies between a device and the host.
trait Route: Send + Sync {
    /// Returns a copy of `x` on the host.
    fn down(&self, x: &Tensor) -> Result<Tensor>;

    /// Returns a copy of the host tensor `y` on `device`.
    fn up(&self, y: Tensor, device: &Device) -> Result<Tensor>;
}

/// Copies by candle. Host tensors are not copied.
struct Copying;

impl Route for Copying {
    fn down(&self, x: &Tensor) -> Result<Tensor> {
        match x.device() {
            Device::Cpu => Ok(x.detach()),
            // candle copies the whole buffer of a view, so make it contiguous first.
            _ => Ok(to_host(&x.detach().force_contiguous()?)?),
        }
    }

    fn up(&self, y: Tensor, device: &Device) -> Result<Tensor> {
        Ok(y.to_device(device)?)
    }
}

impl Collective for StagedGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn check_device(&self, _device: &Device) -> Result<()> {
        Ok(())
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
        self.stage(x, |x| self.group.start_all_reduce(x, op))
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        self.stage(x, |x| self.group.start_all_gather(x))
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        self.stage(x, |x| self.group.start_reduce_scatter(x))
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        self.stage(x, |x| self.group.start_all_to_all(x, send, recv))
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        self.stage(x, |x| self.group.start_broadcast(x, root))
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        let (route, device) = (Arc::clone(&self.route), x.map_or(&self.device, Tensor::device).clone());
        let x = x.map(|x| self.route.down(x)).transpose()?;
        let received = self.group.start_send_recv(x.as_ref(), to, recv)?;
        Ok(received.then(move |y| y.map(|y| route.up(y, &device)).transpose()))
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        let part = self.group.split(name, lists)?;
        if part.leaves_tensors_in_place() {
            return Ok(part);
        }
        Ok(Arc::new(Self { group: part, device: self.device.clone(), route: Arc::clone(&self.route) }))
    }
}

#[cfg(test)]
#[path = "../tests/cases/mod.rs"]
mod cases;

#[cfg(test)]
#[path = "../tests/cases/mapped.rs"]
mod mapped;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;
    use std::time::Duration;

    use candle_core::TensorId;

    use super::mapped::MappedGroup;
    use super::*;
    use crate::{Options, World, threads};

    /// Simulated device: its tensors are CPU tensors with reversed elements, so that a missing copy changes the result.
    ///
    /// Records the ids of the tensors that it has copied to the host.
    #[derive(Default)]
    struct Mirror(Mutex<HashSet<TensorId>>);

    /// Returns a tensor with the elements reversed, in a new storage.
    fn mirrored(x: &Tensor) -> Result<Tensor> {
        let flat = x.detach().flatten_all()?;
        let flat = if flat.elem_count() > 1 { flat.flip(&[0])? } else { flat.copy()? };
        Ok(flat.reshape(x.shape())?)
    }

    impl Route for Mirror {
        fn down(&self, x: &Tensor) -> Result<Tensor> {
            let x = mirrored(x)?;
            self.0.lock().unwrap().insert(x.id());
            Ok(x)
        }

        fn up(&self, y: Tensor, _device: &Device) -> Result<Tensor> {
            mirrored(&y)
        }
    }

    /// Runs every case with tensors of the simulated device.
    fn check(world: &World) -> Result<u64> {
        let route = Arc::new(Mirror::default());
        let host = Arc::clone(&route);
        let only_staged = move |x: &Tensor| {
            assert!(host.0.lock().unwrap().contains(&x.id()), "a device tensor reached the CPU group");
            Ok(x.clone())
        };
        let group = Arc::new(MappedGroup::new(world.group(), only_staged, Ok));
        let staged = Arc::new(StagedGroup { group, device: Device::Cpu, route });
        cases::check(&MappedGroup::new(staged, mirrored, |y| mirrored(&y)))
    }

    #[test]
    fn device_tensors_are_staged_through_the_host() {
        let options = Options { timeout: Duration::from_secs(60), record: false };
        for size in [1, 2, 3] {
            let plain = threads::run(size, options, |world| cases::check(&*world.group())).unwrap();
            assert_eq!(threads::run(size, options, check).unwrap(), plain);
        }
    }

    #[test]
    fn host_tensors_are_not_copied() {
        let staged = StagedGroup::new(Arc::new(crate::Solo), &Device::Cpu);
        let x = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        assert_eq!(staged.all_reduce(&x, Reduce::Sum).unwrap().id(), x.id());
    }
}
