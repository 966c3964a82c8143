"""The learner: recorded batches in, versions of the weights out.

settings     what may be set; learning rate, ZeRO stage, loss, publication
advantage    rewards of a group -> advantages                                         pure
loss         log-probs -> clipped, corrected token loss and its figures               pure
batch        batch -> plan for all ranks, the learner's own staleness check, arrays   pure
device       what CPU, CUDA and ROCm decide                                           pure
model        Hugging Face model that scores given tokens
engine       DeepSpeed around it: accumulate, step, weights, save, load
ranks        the ranks' process group
checkpoint   complete, verified directories on disk
export       a version in Hugging Face format
trainer      one rank without sockets: restore, train, save, pack, export
weights      buckets of a version, and the server that engines get them from
step_log     figures of the steps
learner      the role: take, check, fetch, train, checkpoint, record, publish
sft          supervised fine-tuning, for the cold start
"""
