"""The detection of TensorFlow's own log lines, and of those without information."""

from __future__ import annotations

import pytest

from autodist.logs.tensorflow_log import is_no_failure, is_routine_line
from tests.log_lines import is_log_line

SAID_IN_EVERY_RUN = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795321859.568093   23362 port.cc:153] oneDNN custom operations are on. You may see slightly different \
numerical results due to floating-point round-off errors from different computation orders. To turn them off, set the \
environment variable `TF_ENABLE_ONEDNN_OPTS=0`.
I0000 00:00:1795321859.568474   23362 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be \
used.
I0000 00:00:1795321859.692028   23362 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available \
CPU instructions in performance-critical operations.
To enable the following instructions: AVX2 AVX512F AVX512_VNNI AVX512_BF16 FMA, in other operations, rebuild \
TensorFlow with the appropriate compiler flags.
E0000 00:00:1795321863.380456   23362 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to \
cuInit: UNKNOWN ERROR (303)
I0000 00:00:1795321864.310807   23362 grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:20245
I0000 00:00:1795321869.818757   23730 master.cc:243] Scanning workers for devices: 2 total workers
I0000 00:00:1795321869.891403   23730 mlir_graph_optimization_pass.cc:437] MLIR V1 optimization pass is not enabled
I0000 00:00:1795321869.891817   23730 coordination_service.cc:221] Initializing CoordinationService
W0000 00:00:1795321870.931277   23805 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: \
Cleanup 55963058904290403 [type.googleapis.com/tensorflow.DerivedStatus='']
W0000 00:00:1795693388.666633    9644 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: Step \
63439925937907127 cancelled.  Cancelling rendezvous. [type.googleapis.com/tensorflow.DerivedStatus='']
\t [[{{node autodist_inbox_0/QueueDequeueV2_1_S15}}]] [type.googleapis.com/tensorflow.DerivedStatus='']
\t [[{{node autodist_inbox_0/QueueDequeueV2_S23}}]]
E0000 00:00:1795701386.165791   29620 master_session.cc:1972] Cleanup partition error: UNAVAILABLE: \
recvmsg:Connection reset by peer
W0000 00:00:1795701738.061102   11145 local_rendezvous.cc:412] Local rendezvous is aborting with status: UNAVAILABLE: \
Socket closed
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling \
/tensorflow.WorkerService/CleanupGraph:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
:{"created":"@1795861723.58","description":"Error received from peer ipv4:127.0.0.1:4",\
"file":"external/com_github_grpc_grpc/src/core/lib/surface/call.cc","file_line":1056,\
"grpc_message":"Socket closed","grpc_status":14}
W0000 00:00:1795693355.382113    4117 grpc_worker_service.cc:536] RecvTensor cancelled for 117026252381131824
I0000 00:00:1795693355.382133    4117 worker.cc:216] Cancellation requested for RunGraph.
I0000 00:00:1795693355.382160    4117 local_rendezvous.cc:432] Local rendezvous recv item cancelled. Key hash: \
1069453879342203536
W0000 00:00:1795323498.452383   23135 queue_base.cc:286] d9b6298e4030903f/whole/1/0: Skipping cancelled dequeue \
attempt with queue not closed
W0000 00:00:1795738276.966756    8612 queue_base.cc:286] autodist/reshard/17/0/piece/float32(32, 16)/0/1: Skipping \
cancelled dequeue attempt with queue not closed
I0000 00:00:1795738264.081029    8034 service.cc:161]   StreamExecutor [0]: Host, Default Version (Driver: 0.0.0; \
Runtime: 0.0.0; Toolkit: 0.0.0; DNN: 0.0.0)
I0000 00:00:1795321870.931277   23805 local_rendezvous.cc:407] Local rendezvous is aborting with status: OUT_OF_RANGE: \
End of sequence
W0000 00:00:1795657943.582472    8662 util.cc:163] Not handling type DT_DOUBLE
I0000 00:00:1795388561.931507   19853 profiler_session.cc:117] Profiler session initializing.
I0000 00:00:1795388561.931552   19853 profiler_session.cc:132] Profiler session started.
I0000 00:00:1795388561.936091   19854 profiler_session.cc:81] Profiler session collecting data.
W0000 00:00:1795388561.936149   19854 xplane_to_step_stats.cc:84] GPU trace was not collected.
I0000 00:00:1795388561.936164   19854 profiler_session.cc:150] Profiler session tear down.
E0000 00:00:1795322720.995025   14754 node_def_util.cc:682] NodeDef mentions attribute keep_dims which is not in the \
op definition: Op<name=ArgMax; signature=input:T, dimension:Tidx -> output:output_type> This may be expected if your \
graph generating binary is newer  than this binary. Unknown attributes will be ignored. NodeDef: {{node step_3/ArgMax}}
2025-03-01 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see slightly \
different numerical results due to floating-point round-off errors from different computation orders.
2025-03-01 10:00:00.123456: I external/local_xla/xla/tsl/cuda/cudart_stub.cc:32] Could not find cuda drivers on your \
machine, GPU will not be used.""".splitlines()

SAYS_SOMETHING = [
    "E0000 00:00:1795321863.380456   23362 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed "
    "call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver / cuda driver "
    "combination",
    "W0000 00:00:1795321863.380456   23362 gpu_device.cc:2430] Cannot dlopen some GPU libraries. Please make sure ...",
    "W0000 00:00:1795321870.931277   23805 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
    "INVALID_ARGUMENT: Incompatible shapes: [2] vs. [3]",
    "W0000 00:00:1795321870.931277   23805 cpu_allocator_impl.cc:83] Allocation of 819200000 exceeds 10% of free "
    "system memory.",
    "I0000 00:00:1795321859.568093   23362 port.cc:153] something new",
    "E0000 00:00:1795701386.165791   29620 master_session.cc:1972] Cleanup partition error: INTERNAL: no memory",
    "F0000 00:00:1795321859.568093   23362 cpu_feature_guard.cc:30] The TensorFlow library was compiled to use AVX "
    "instructions, but these aren't available on your machine.",
]


@pytest.mark.parametrize("line", SAID_IN_EVERY_RUN)
def test_what_every_run_says_says_nothing(line: str) -> None:
    assert is_routine_line(line)
    assert is_log_line(line)


@pytest.mark.parametrize("line", SAYS_SOMETHING)
def test_what_is_not_known_is_kept(line: str) -> None:
    assert not is_routine_line(line)
    assert is_log_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "loss 0.3",
        "my script: oneDNN custom operations are on.",
        "ValueError: Local rendezvous is aborting with status: ABORTED: Cleanup 3",
        "I think that port.cc:153] oneDNN custom operations are on",
    ],
)
def test_what_a_script_says_is_not_tensorflows(line: str) -> None:
    assert not is_log_line(line)
    assert not is_routine_line(line)


@pytest.mark.parametrize(
    "line",
    [
        *SAID_IN_EVERY_RUN,
        "I0000 00:00:1795321859.568093   23362 service.cc:153] something new",
        "\t [[{{node step_1/autodist/fifo_queue_1_Dequeue}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
    ],
)
def test_what_has_no_part_in_a_failure(line: str) -> None:
    assert is_no_failure(line)


@pytest.mark.parametrize(
    "line",
    [
        *[line for line in SAYS_SOMETHING if not line.startswith("I")],
        "I0301 10:00:00.123456 140123456 train.py:12] the script's own log",
        "\t [[{{node step_1/MatMul}}]]",
        "ValueError: no",
        "",
    ],
)
def test_what_may_be_the_reason_of_a_failure_is_kept(line: str) -> None:
    assert not is_no_failure(line)
