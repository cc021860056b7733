"""The pure core of the workflows: messages in, messages and instructions out; no clock, no loop, no I/O.

Theory of operation
===================
Three kinds of machines, each with one `handle(message) -> list[Send | Instruction]`:

- an **origin**, one a node, makes calls. It owns the record of each of its calls until that is resolved, chooses the
  instance that a call goes to, and is told whatever becomes of it. What a handle shows is what the origin knows.
- a **controller**, one an instance of an agent, keeps the queue of that instance, holds calls back until the values
  that they need are here, has one call run (or one batch), and pushes each value to those who need it.
- the **directory**, one a deployment, says at which instance a session of a pinned agent is at home.

Messages between two machines arrive in the order in which they were sent; between three, in any. A message to a machine
that is gone comes back as `Gone`, behind all that the machine had sent, and everybody else who was there hears of it at
some time. That is all that is assumed of what carries them.

**Values are pushed.** Who needs a value subscribes with the controller that makes it (`Subscribe`), and gets a
`Result`. A controller forgets a call that is finished or has left; who asks it then is passed on to the call's origin.
An origin keeps a record until it is resolved and no call of its node waits for it, so asking it always ends.

**A move**, of a session from one instance to another, takes six steps, and only controllers take part:

  1. `Migrate` reaches the controller that has it. The session is fenced: none of its calls begins there any more.
  2. Each producer of a value that one of its calls waits for is asked whether the value has left (`Retarget`).
  3. If not, the producer sends it to the new place. If it has, the controller waits until it arrives.
  4. The origins of its calls are told (`ExecutorChanged`), and the directory is (`HomeMoved`).
  5. Its calls and its state go over in one `Transfer`.
  6. The new controller puts them into its queue, and says so (`Activated`).

A call that comes to the old place afterwards is sent on. One that comes to the new place before its state does is held
until then: a home has a version, and each call bears the version that its origin knows. A call whose home is over goes
back to its origin, which sends it to the present one.

**What is lost** with an instance fails: its origin hears `Gone`, and fails each call that is there as far as it knows.
A session whose home is lost has lost its state, so until it has ended its calls to that agent fail, too. A record is
resolved once; what comes later is dropped. Nothing is tried again by itself.
"""
