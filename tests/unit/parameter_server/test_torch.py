"""Torch modules in, torch tensors moved in place: the same bits."""

import asyncio

import torch

from ciuic import AsyncParameterServer


def test_a_module_is_served_and_its_copies_follow_bit_for_bit() -> None:
    async def story() -> None:
        torch.manual_seed(0)
        model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        copy.load_state_dict(model.state_dict())
        server = AsyncParameterServer(model)
        for _ in range(5):
            step = {name: torch.randn_like(value) for name, value in model.named_parameters()}
            await server.push_update("a", step)
        before = copy.weight.data_ptr()
        delta = await server.pull_update("b")
        assert delta is not None
        delta.apply(copy)
        assert copy.weight.data_ptr() == before
        for name, value in copy.state_dict().items():
            assert torch.equal(value, torch.from_numpy(server.params[name]))
        half = torch.nn.Linear(3, 2).to(torch.bfloat16)
        assert AsyncParameterServer(half).version == 0

    asyncio.run(story())
