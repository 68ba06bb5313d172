//! How a process gets into the world that it was started for.

use crate::place::{Master, Place};
use crate::store::{Client, Server};
use crate::{Options, Result, World};

impl World {
    /// Joins the world of `place`, in which all ranks run on one machine: between machines `nccl` and `mpi` are used. Rank
    /// 0 hosts the store where the ranks meet, unless the launcher does.
    pub fn join(place: &Place, options: Options) -> Result<Self> {
        let Place { rank, world_size, restart, master: Master { addr, port, agent_hosts_store }, .. } = place;
        let size = match *world_size {
            1 => return Ok(Self::solo()),
            size => size,
        };
        let host = (*rank == 0 && !agent_hosts_store).then(|| Server::bind_any(*port)).transpose()?;
        let store = Client::connect(addr, *port, options.timeout)?.with_prefix(&format!("candlewick/{restart}"));
        Ok(connect(&store, *rank, size, options)?.with_host(host))
    }
}

#[cfg(target_os = "linux")]
fn connect(store: &Client, rank: usize, size: usize, options: Options) -> Result<World> {
    crate::local::join(store, rank, size, options)
}

#[cfg(not(target_os = "linux"))]
fn connect(_store: &Client, rank: usize, size: usize, _options: Options) -> Result<World> {
    Err(crate::Error::Join { rank, size, why: "processes of one machine are connected on Linux only".to_owned() })
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::{Error, Reduce, exchange_bytes};
    use candle_core::{Device, Tensor};

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_find_each_other_through_the_launchers_store() -> Result<()> {
        let server = Server::bind("127.0.0.1:0")?;
        let master = Master { addr: "127.0.0.1".to_owned(), port: server.port(), agent_hosts_store: true };
        let place = |rank| Place { rank, world_size: 3, local_world_size: 3, master: master.clone(), ..Place::alone() };
        let join = |rank| {
            let place = place(rank);
            thread::spawn(move || {
                let world = World::join(&place, Options { timeout: Duration::from_secs(60), record: false })?;
                let sum = world.group().all_reduce(&Tensor::new(rank as f32, &Device::Cpu)?, Reduce::Sum)?;
                let told = exchange_bytes(&*world.group(), &vec![rank as u8; rank])?;
                Ok::<_, Error>((sum.to_scalar::<f32>()?, told))
            })
        };
        let ranks: Vec<_> = (0..3).map(join).collect();
        for rank in ranks {
            let (sum, told) = rank.join().expect("the rank did not panic")?;
            assert_eq!((sum, told), (3.0, vec![vec![], vec![1], vec![2, 2]]));
        }
        Ok(())
    }

    #[test]
    fn one_rank_asks_nobody() -> Result<()> {
        let world = World::join(&Place::alone(), Options::default())?;
        assert_eq!((world.rank(), world.size()), (0, 1));
        assert_eq!(exchange_bytes(&*world.group(), b"mine")?, [b"mine"]);
        Ok(())
    }
}
