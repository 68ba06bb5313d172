//! The ranks that each launcher's variables give, and the errors of variables that contradict each other.

#![allow(clippy::unwrap_used)]

use super::*;

fn variables(text: &str) -> Variables {
    text.split_whitespace().filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
}

#[track_caller]
fn check(text: &str, want: &str) {
    let got = match RankEnv::from_variables(&variables(text)) {
        Ok(env) => match &env.master {
            Ok(_) => env.to_string(),
            Err(error) => format!("{env}; failed to {error}"),
        },
        Err(error) => format!("failed to {error}"),
    };
    assert_eq!(got, want);
}

const TORCHRUN: &str = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=n0 \
    MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True ";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1099169793 ";
const PMI: &str = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 ";
const SLURM: &str = "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=123456 \
    SLURM_JOB_NODELIST=node[02-03,07] SLURM_STEP_TASKS_PER_NODE=4(x2) ";

#[test]
fn each_launchers_variables_are_read() {
    check("", "rank 0 of 1, local rank 0 of 1, node 0, rank 0 at 127.0.0.1:29500, started without a launcher");
    check(TORCHRUN, "rank 3 of 4, local rank 1 of 2, node 1, the launcher's store at n0:29500, started by torchrun");
    check(OPEN_MPI, "rank 1 of 2, local rank 1 of 2, node 0, rank 0 at 127.0.0.1:24793, started by Open MPI");
    check(PMI, "rank 1 of 2, local rank 1 of 2, node 0, rank 0 at 127.0.0.1:29500, started by PMI");
    check(SLURM, "rank 5 of 8, local rank 1 of 4, node 1, rank 0 at node02:18456, started by Slurm");
}

#[test]
fn the_closest_launcher_takes_precedence() {
    let all = [TORCHRUN, OPEN_MPI, PMI, SLURM];
    for (i, launcher) in [Launcher::Torchrun, Launcher::OpenMpi, Launcher::Pmi, Launcher::Slurm].into_iter().enumerate()
    {
        let world = RankEnv::from_variables(&variables(&all[i..].concat())).unwrap();
        assert_eq!(world.launcher, launcher);
    }
}

#[test]
fn a_single_rank_needs_no_local_rank() {
    check(
        "RANK=0 WORLD_SIZE=1",
        "rank 0 of 1, local rank 0 of 1, node ?, rank 0 at 127.0.0.1:29500, started by torchrun",
    );
}

#[test]
fn contradicting_variables_are_named() {
    check("RANK=0", "failed to read the rank: RANK is set but WORLD_SIZE is not");
    check("WORLD_SIZE=2", "failed to read the rank: WORLD_SIZE is set but RANK is not");
    check("RANK=0 WORLD_SIZE=2", "failed to read the rank: RANK is set but LOCAL_RANK is not");
    check("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "failed to read the rank: WORLD_SIZE is set but LOCAL_WORLD_SIZE is not");
    check(&format!("{TORCHRUN} RANK=4"), "failed to read the rank: RANK=4 must be less than WORLD_SIZE=4");
    check(
        &format!("{TORCHRUN} LOCAL_RANK=2"),
        "failed to read the rank: LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2",
    );
    check(
        &format!("{TORCHRUN} LOCAL_WORLD_SIZE=9"),
        "failed to read the rank: LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=4",
    );
    check(&format!("{TORCHRUN} RANK=one"), "failed to read the rank: RANK=one is not a number");
    check(
        &format!("{TORCHRUN} MASTER_PORT=70000"),
        "failed to read the rank: MASTER_PORT=70000 is not a number up to 65535",
    );
    check(
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1",
        "failed to find the node of rank 0: torchrun does not export it; set MASTER_ADDR",
    );
}

#[test]
fn mpi_on_several_nodes_needs_master_addr() {
    check(
        &format!("{OPEN_MPI} OMPI_COMM_WORLD_SIZE=4"),
        "rank 1 of 4, local rank 1 of 2, node ?, rank 0 unknown without MASTER_ADDR, started by Open MPI; failed to \
         find the node of rank 0: Open MPI does not export it; set MASTER_ADDR (mpirun -x MASTER_ADDR=HOST)",
    );
    check(
        &format!("{OPEN_MPI} OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=n0 MASTER_PORT=7"),
        "rank 1 of 4, local rank 1 of 2, node ?, rank 0 at n0:7, started by Open MPI",
    );
    check("PMI_RANK=0 PMI_SIZE=2", "failed to read the rank: PMI_RANK is set but MPI_LOCALRANKID is not");
    check(
        "OMPI_COMM_WORLD_RANK=0",
        "failed to read the rank: OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not",
    );
}

#[test]
fn two_jobs_on_one_node_have_two_ports() {
    let env = |job: &str| RankEnv::from_variables(&variables(&format!("{PMI} I_MPI_HYDRA_UUID={job}"))).unwrap();
    let port = |job: &str| env(job).master.unwrap().port;
    let (one, other) = (port("b9440000-e26c-bd81-d160-06001125053e"), port("ba440000-e26c-bd81-d160-06001125053e"));
    assert_ne!(one, other);
    assert!([one, other].iter().all(|port| (15000..25000).contains(port)));
}

#[test]
fn srun_with_pmi_is_slurm() {
    check(
        &format!("{SLURM} PMI_RANK=5 PMI_SIZE=8"),
        "rank 5 of 8, local rank 1 of 4, node 1, rank 0 at node02:18456, started by Slurm",
    );
}

/// The mpirun of MPICH and Intel MPI passes on Slurm's variables: those of the batch script, or of its one task on a node.
#[test]
fn hydra_within_slurm_is_pmi_on_every_rank() {
    for rank in 0..4 {
        let hydra = format!("PMI_RANK={rank} PMI_SIZE=4 MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=4 ");
        let script = "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7 ";
        let in_script = RankEnv::from_variables(&variables(&(hydra.clone() + script))).unwrap();
        let proxy = format!("{script} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1");
        let by_srun = RankEnv::from_variables(&variables(&(hydra + &proxy))).unwrap();
        for env in [in_script, by_srun] {
            assert_eq!((env.rank, env.world_size, env.launcher), (rank, 4, Launcher::Pmi));
        }
    }
}

#[test]
fn a_world_size_alone_does_not_hide_another_launcher() {
    let env = RankEnv::from_variables(&variables(&format!("{SLURM} WORLD_SIZE=8 MASTER_ADDR=n3"))).unwrap();
    assert_eq!((env.rank, env.launcher, env.master.unwrap().addr.as_str()), (5, Launcher::Slurm, "n3"));
}

#[test]
fn a_batch_script_is_a_single_rank() {
    let script = SLURM.replace("SLURM_STEP_ID=0 ", "").replace("SLURM_PROCID=5", "SLURM_PROCID=0");
    assert_eq!(RankEnv::from_variables(&variables(&script)).unwrap(), RankEnv::single());
}

#[test]
fn a_shell_of_salloc_is_one_task() {
    let shell = "SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0 \
        SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=1";
    let world = RankEnv::from_variables(&variables(shell)).unwrap();
    assert_eq!((world.rank, world.world_size), (0, 1));
}

#[test]
fn slurm_tasks_may_differ_from_node_to_node() {
    for (node, want) in [(0, 3), (1, 3), (2, 2)] {
        let text = format!("{SLURM} SLURM_NODEID={node} SLURM_STEP_TASKS_PER_NODE=3(x2),2");
        assert_eq!(RankEnv::from_variables(&variables(&text)).unwrap().local_world_size, want);
    }
    check(
        &format!("{SLURM} SLURM_NODEID=7"),
        "failed to read the rank: SLURM_STEP_TASKS_PER_NODE=4(x2) is not a number, or n(xm)",
    );
    check(
        &format!("{SLURM} SLURM_PROCID=8"),
        "failed to read the rank: SLURM_PROCID=8 must be less than SLURM_NTASKS=8",
    );
    check(
        &format!("{SLURM} SLURM_JOB_NODELIST=node["),
        "failed to find the node of rank 0: SLURM_JOB_NODELIST=node[ is not a list of hosts",
    );
}
